"""From rows to what people read: tables, summaries, figures and reports."""
