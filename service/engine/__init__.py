"""The reference serving engine: slots, rounds, verification. It knows no HTTP, no SQL and no Redis."""
