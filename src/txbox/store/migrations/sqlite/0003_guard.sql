-- txbox schema version 3: of PostgreSQL only. The guard of SQLite is a foreign key.

INSERT INTO txbox_schema (version, compatible_from) VALUES (3, 1);
