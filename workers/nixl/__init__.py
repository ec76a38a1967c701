"""KV blocks between engines over NIXL: registered memory, one-sided reads and writes with deadlines, notices."""
