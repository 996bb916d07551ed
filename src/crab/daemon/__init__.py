"""What owns a state directory: registry, operations, API, sweep."""
