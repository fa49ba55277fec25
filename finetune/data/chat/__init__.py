"""Conversations to target tokens: what a chat template renders, and which parts of it the assistant has to generate."""
