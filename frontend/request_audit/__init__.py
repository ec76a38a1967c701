"""The audit stream: what was asked, by whom, what it cost and how it ended, stored away from the path of requests."""
