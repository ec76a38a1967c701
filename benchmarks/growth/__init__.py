"""How requests/s and CPU grow with frontends, routers and workers on one machine of many cores, and what nats-server can do."""
