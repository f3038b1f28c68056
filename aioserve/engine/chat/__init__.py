"""Chats: tools, schemas that bind replies, and how one model writes calls and reasoning."""
