"""An agent of LangGraph that uses a tool to add. agent.py runs it; it does not import the suite.

pip install langchain langchain-openai
"""

from __future__ import annotations

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
graph = create_agent(model, [add])
state = graph.invoke({"messages": json.load(sys.stdin)["messages"]}, {"recursion_limit": 8})
print(str(state["messages"][-1].content).strip())
