"""`redraft demo`: the whole circle on real prompts, watched live, and measured at the end."""
