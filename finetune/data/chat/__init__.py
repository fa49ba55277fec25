"""Conversations to supervised tokens: what a chat template writes, and which of it the assistant has to write.

- `conversation`: a row's turns, checked
- `template`: the Jinja text that renders them, the tokenizer's own or the user's
- `answers`: where in the rendering the assistant's words and the end of its turn are, proven or refused
- `tokens`: from characters to tokens
- `encode`: rows to examples, with what was lost counted and, past a share, refused; and to prompts that wait for an
  answer
"""
