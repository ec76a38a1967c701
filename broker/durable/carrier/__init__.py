"""Carries stored jobs: pulls them, checks them, submits them under the ingress of this process, and writes their ends."""
