"""One method held against others over several folders of results: paired, chosen on validation data, bar by bar."""
