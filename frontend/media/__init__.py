"""Images, videos and sounds in requests: found, fetched within limits, named by their content, and put into the prompt.

parts.py      content parts of messages → what is meant, or an error that names the part
addresses.py  which hosts and addresses may be asked
client.py     one GET over one connection to one checked address
fetch.py      URL → bytes: names resolved once, redirects, every limit
sniff.py      what the bytes are
loader.py     all items of a request, a bounded number at once, heavy work in threads
placing.py    items → placeholder tokens, spans, block identity
"""
