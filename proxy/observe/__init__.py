"""What is known of each request: one record, and its projections to metrics, log and response headers."""
