"""Small trainings, kept by what decides their weights, and fair comparisons of what came out of them."""
