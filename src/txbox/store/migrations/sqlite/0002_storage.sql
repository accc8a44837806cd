-- txbox schema version 2: of PostgreSQL only. SQLite reuses free pages by itself.

INSERT INTO txbox_schema (version, compatible_from) VALUES (2, 1);
