-- txbox schema version 11: the other databases count by a key, and need nothing for pages of the newest rows.
INSERT INTO txbox_schema (version, compatible_from) VALUES (11, 1)
    ON DUPLICATE KEY UPDATE compatible_from = 1;
