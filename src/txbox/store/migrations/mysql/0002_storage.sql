-- txbox schema version 2: of PostgreSQL only. InnoDB purges and reuses space by itself.

INSERT INTO txbox_schema (version, compatible_from) VALUES (2, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
