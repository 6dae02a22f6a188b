"""What each part of TAPAS' cost equation adds to the ranking of strategies."""
