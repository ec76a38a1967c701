"""Traces of requests for OpenTelemetry: built after a request has ended, from what its ingress has heard."""
