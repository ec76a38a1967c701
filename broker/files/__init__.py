"""Files and uploads of tenants: their records, contents, quotas and expiry."""
