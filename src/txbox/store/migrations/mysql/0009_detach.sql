-- txbox schema version 9: of PostgreSQL only. There are no partitions elsewhere.

INSERT INTO txbox_schema (version, compatible_from) VALUES (9, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
