"""Files and uploads in parts, as OpenAI's API has them."""
