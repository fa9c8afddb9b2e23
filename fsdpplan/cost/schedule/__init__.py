"""Schedule: pipelines played action by action, and how blocks are split over their stages."""
