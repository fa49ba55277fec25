"""Conversations to target tokens: what a chat template renders, and which parts of it the assistant has to generate.

- `conversation`: a row's turns, checked
- `template`: the Jinja template that renders them, the tokenizer's own or the user's
- `answers`: positions of the assistant's words and end of turn in the rendering, proven or refused
- `tokens`: from characters to tokens
- `encode`: rows to examples, with losses counted and limited; and to prompts that wait for an answer
"""
