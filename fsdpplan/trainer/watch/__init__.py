"""Watch: what a run tells while it trains, and when it ends by itself."""
