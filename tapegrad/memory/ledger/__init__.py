"""The ledger: who counts bytes and work, by category, scope and source line."""
