"""FlashAttention's own tests, run against autoflash. Their file is fetched when they run, and is no part of this."""
