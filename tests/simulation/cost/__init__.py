"""What a request costs a frontend, a router and a worker, in calls: a figure that no busy machine changes."""
