"""What is remembered between requests: one interface, in this process or in Redis. Never waited for without a bound."""
