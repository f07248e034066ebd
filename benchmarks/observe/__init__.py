"""What seeing costs."""
