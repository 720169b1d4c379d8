"""An MCP server that keeps a total for each session."""

import os
from collections import Counter

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("counting")
totals = Counter()


@server.tool()
def count(by: int, context: Context) -> int:
    """Add to the total of the session."""
    headers = context.headers or {}
    session = headers.get("mcp-session-id", "")
    totals[session] += by
    return totals[session]


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
