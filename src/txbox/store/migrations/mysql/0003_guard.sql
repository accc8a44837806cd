-- txbox schema version 3: of PostgreSQL only. MySQL and MariaDB have no trigger that guards.

INSERT INTO txbox_schema (version, compatible_from) VALUES (3, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
