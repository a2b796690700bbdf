"""From a plan to rows: stacks are trained, evaluated and recorded."""
