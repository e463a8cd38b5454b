import { describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { applyChatTemplate, encodeChat, requireChatTemplate } from './chat.js';
import { createTokenizer, type Tokenizer } from './tokenizer.js';

const TEMPLATE = `{%- if tools %}[{{ tools | length }} tools]{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{{ bos_token }}{{ message.role }}: {{ message.content | trim }}
{% endfor %}
{%- if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}`;

const tokenizer: Tokenizer = {
  ...createTokenizer('byte'),
  chat: {
    templates: new Map([
      ['default', TEMPLATE],
      ['short', '{{ messages[0].content }}'],
    ]),
    variables: { bos_token: '^' },
  },
};
const messages = [
  { role: 'user', content: ' Hello ' },
  { role: 'assistant', content: 'Hi.' },
];

describe('applyChatTemplate', () => {
  it('renders messages with the names of special tokens, and ends where the answer begins', () => {
    expect(applyChatTemplate(tokenizer, messages)).toBe('^user: Hello\n^assistant: Hi.\n');
    expect(applyChatTemplate(tokenizer, messages.slice(0, 1), { addGenerationPrompt: true })).toBe(
      '^user: Hello\n^assistant:',
    );
  });

  it('passes variables, and takes a template by name', () => {
    expect(applyChatTemplate(tokenizer, [], { variables: { tools: [1, 2] } })).toBe('[2 tools]');
    expect(applyChatTemplate(tokenizer, messages, { template: 'short' })).toBe(' Hello ');
  });

  it('encodes the text', () => {
    expect(tokenizer.decode(encodeChat(tokenizer, messages))).toBe('^user: Hello\n^assistant: Hi.\n');
  });

  it('reports the message of a template that refuses', () => {
    const refused = () => applyChatTemplate(tokenizer, [{ role: 'tool', content: '' }]);
    expect(refused).toThrow(UsageError);
    expect(refused).toThrow('chat template: no role tool');
  });

  it('names the remedy where there is no template', () => {
    expect(() => requireChatTemplate(tokenizer)).not.toThrow();
    expect(() => requireChatTemplate(createTokenizer('byte'))).toThrow('tokenizer byte has no chat template');
    expect(() => applyChatTemplate(createTokenizer('byte'), messages)).toThrow(
      'tokenizer byte has no chat template; put a chat_template.jinja beside its tokenizer.json',
    );
    expect(() => applyChatTemplate(tokenizer, messages, { template: 'rag' })).toThrow(
      'no chat template "rag"; it has default, short',
    );
  });
});
