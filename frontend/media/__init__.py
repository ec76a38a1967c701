"""Images, videos and sounds in requests: found, fetched within limits, identified by their content, and put into the prompt.

parts.py         content parts of messages → media parts, or an error that names the part
addresses.py     checks of URLs, hosts and addresses
client.py        a GET over one connection to one checked address
fetch.py         URL → bytes: names resolved once, redirects, every limit
inline.py        data URLs and base64 text → bytes
sniff.py         media type by the first bytes
loader.py        all items of a request, a bounded number at a time, heavy work in threads
placeholders.py  items → placeholder tokens, spans, block identity
"""
