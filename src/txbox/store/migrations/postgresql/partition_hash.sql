-- The inbox in 16 partitions by a hash of its key: smaller indexes, and vacuums that run side by side.
-- Retention deletes by batch, as in a plain table.

DO $partition$
BEGIN
    FOR number IN 0 .. 15 LOOP
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF txbox_inbox FOR VALUES WITH (MODULUS 16, REMAINDER %s) [storage]',
                       (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                         WHERE c.oid = 'txbox_inbox'::regclass::oid),
                       'txbox_inbox_hash_' || lpad(number::text, 2, '0'), number);
    END LOOP;
END
$partition$;
