"""Tiers of KV blocks below vLLM's device: settings, and what vLLM loads of them into its own processes."""
