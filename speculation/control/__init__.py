"""Control of speculation: `controller` decides how many tokens requests draft, by `estimator`."""
