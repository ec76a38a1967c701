"""Requests and answers of the HTTP surface as msgspec structs."""
