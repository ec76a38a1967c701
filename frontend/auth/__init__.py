"""Decides who may ask what: hosts and origins of requests, keys, their rights and their quotas."""
