-- txbox schema version 4: of PostgreSQL only. Functions that run with their owner's rights exist nowhere else.

INSERT INTO txbox_schema (version, compatible_from) VALUES (4, 1);
