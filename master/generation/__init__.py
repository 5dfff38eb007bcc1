"""From requests to tokens: admission, pages, steps, sampling, the end of an answer."""
