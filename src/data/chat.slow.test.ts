import { describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { threadMilliseconds } from '../time-limit.js';
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

describe('the template of a stranger', () => {
  const render = (source: string) => {
    const chat = { templates: new Map([['default', source]]), variables: {} };
    return applyChatTemplate({ ...tokenizer, chat }, messages);
  };
  const doubled = (text: string) => `${text}${'{% set x = x ~ x %}'.repeat(60)}`;
  const nested = (depth: number) => '{% for a in range(1000) %}'.repeat(depth) + '{% endfor %}'.repeat(depth);

  it.each([
    ['a range of a billion', '{% for a in range(1000000000) %}x{% endfor %}', 'list of more than 1000000 items'],
    ['an endless range', '{{ range(0, 1, 0.0000001) | length }}', 'list of more than 1000000 items'],
    ['nested loops', nested(4), 'use another one'],
    ['nested loops that print', nested(3).replace('{% endfor %}', 'x{% endfor %}'), 'use another one'],
    ['a text that doubles', doubled('{% set x = "12345678" %}'), 'text of more than'],
    ['a list that doubles', `{% set x = [1,2,3,4] %}${'{% set x = x + x %}'.repeat(60)}`, 'items'],
    [
      'a list of lists, printed',
      `{% set x = [1] %}${'{% set x = [x,x,x,x] %}'.repeat(30)}{{ x | tojson }}`,
      'more than',
    ],
    [
      'replacements',
      `{% set x = "a" | replace("a", "${'b'.repeat(999)}") %}{% set x = x | replace("b", x) | replace("b", x) %}{{ x | replace("b", x) }}`,
      'use another one',
    ],
    ['an indent', '{{ "a\\nb\\nc" | indent(500000000) }}', 'use another one'],
    ['a macro that calls itself', '{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}', 'chat template'],
    [
      'a macro that calls itself twice',
      '{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}',
      'use another one',
    ],
    ['parentheses', `{{ ${'('.repeat(100_000)}1${')'.repeat(100_000)} }}`, 'use another one'],
  ])('ends in one line: %s', (_, source, reason) => {
    const started = threadMilliseconds();
    expect(() => render(source)).toThrow(UsageError);
    expect(threadMilliseconds() - started).toBeLessThan(4000);
    expect(() => render(source)).toThrow(reason);
  });

  it('has the functions of transformers', () => {
    expect(render('{{ range(3) }} {{ range(5, 1, -2) | length }} {{ True and not False }}')).toBe('[0, 1, 2] 2 true');
    expect(render('{{ strftime_now("%Y") }}')).toBe(String(new Date().getFullYear()));
    expect(render('{{ strftime_now("%d %b %Y %H:%M %%") }}')).toMatch(/^\d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d %$/);
    expect(() => render('{{ raise_exception("no") }}')).toThrow('chat template: no');
  });
});
