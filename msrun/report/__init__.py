"""`msrun report`: one HTML file from what a run recorded."""
