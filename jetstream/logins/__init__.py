"""Logins at nats-server: the roles of a deployment, what each may do, and the accounts, keys and tokens that say so."""
