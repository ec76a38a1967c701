"""Growth of requests/s and CPU with frontends, routers and workers on one machine of many cores, and limits of nats-server."""
