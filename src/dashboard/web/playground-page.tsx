/** The playground: text of the model as it is generated, with the probability of each token and what else it considered. */
import { useEffect, useState } from 'preact/hooks';
import { whole } from './format.js';
import { useGeneration, useReading } from './generation.js';
import {
  type ChatMessage,
  type GeneratedToken,
  type GenerationRequest,
  liveTrace,
  loadCard,
  type ModelCard,
  parts,
} from './model-api.js';
import { Reader, ReaderHint } from './reader-page.js';
import { SAMPLING, SamplingForm, type SamplingValues, samplingFields } from './sampling.js';
import { Alternatives, type Picked, TokenText } from './token-text.js';
import { Card, Empty, Segmented } from './ui.js';

/** A message of a chat; answers of the model keep their tokens. */
interface Message extends ChatMessage {
  readonly tokens?: readonly GeneratedToken[];
  readonly reasoning?: string;
}

/** State that the playground keeps while other pages are shown. The key is never stored. */
export interface Session {
  readonly key: string;
  /** Null until it is chosen: the page then opens on Chat for a model that has a chat template. */
  readonly mode: 'prompt' | 'chat' | null;
  readonly prompt: string;
  readonly output: readonly GeneratedToken[];
  readonly system: string;
  /** JSON of the tools that the model may call; empty: none. */
  readonly tools: string;
  readonly draft: string;
  readonly messages: readonly Message[];
  readonly sampling: SamplingValues;
}

export const NEW_SESSION: Session = {
  key: '',
  mode: null,
  prompt: 'Once upon a time',
  output: [],
  system: '',
  tools: '',
  draft: '',
  messages: [],
  sampling: SAMPLING,
};

interface Props {
  readonly session: Session;
  readonly change: (part: Partial<Session>) => void;
}

export function PlaygroundPage({ session, change }: Props) {
  const [card, setCard] = useState<ModelCard | null>(null);
  const [error, setError] = useState<string | null>(null);
  const connect = () => loadCard(session.key).then(setCard, (problem: Error) => setError(problem.message));
  useEffect(() => {
    if (!parts.has('key') || session.key !== '') void connect();
  }, []);
  if (card) return <Playground {...{ session, change, card }} />;
  if (!parts.has('key'))
    return error ? (
      <Empty title="The model does not answer">
        <p>{error}</p>
        <button
          type="button"
          class="button"
          onClick={() => {
            setError(null);
            void connect();
          }}
        >
          Try again
        </button>
      </Empty>
    ) : (
      <p class="loading">Connecting…</p>
    );
  return (
    <Empty title="This model needs a key">
      <h1 class="hidden">Playground</h1>
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          setError(null);
          void connect();
        }}
      >
        <input
          type="password"
          aria-label="API key"
          placeholder="API key"
          autocomplete="off"
          value={session.key}
          onInput={(event) => change({ key: event.currentTarget.value })}
        />
        <button type="submit" class="button primary" disabled={session.key === ''}>
          Connect
        </button>
      </form>
      <p class="muted">It stays in the memory of this page and is sent to this server only.</p>
      {error ? (
        <p role="alert" class="error">
          {error}
        </p>
      ) : null}
    </Empty>
  );
}

function Playground({ session, change, card }: Props & { readonly card: ModelCard }) {
  const { prompt, output, messages, key } = session;
  const mode = session.mode ?? (card.has_chat_template ? 'chat' : 'prompt');
  const run = useGeneration(key);
  const reading = useReading(key);
  const [picked, setPicked] = useState<Picked | null>(null);
  const isChat = mode === 'chat';

  const start = (text: string, first: readonly GeneratedToken[] = []) => {
    setPicked(null);
    // Tokens may arrive several times before the page is drawn again: they are collected here, not in its state.
    let written = [...first];
    change({ output: written });
    void run.start({ prompt: text + textOf(first), ...samplingFields(session.sampling) }, (tokens) => {
      written = [...written, ...tokens];
      change({ output: written });
    });
  };
  const pending = pendingCall(messages);
  const [toolsError, setToolsError] = useState<string | null>(null);
  const sendMessage = () => {
    setPicked(null);
    const tools = toolsIn(session.tools);
    setToolsError(typeof tools === 'string' ? tools : null);
    if (typeof tools === 'string') return;
    const said: Message = pending
      ? { role: 'tool', content: session.draft, tool_call_id: pending.id }
      : { role: 'user', content: session.draft };
    const asked: Message[] = [...messages, said];
    if (pendingCall(asked)) {
      change({ messages: asked, draft: '' }); // results of all calls are needed first
      return;
    }
    change({ messages: [...asked, { role: 'assistant', content: '', tokens: [] }], draft: '' });
    const request = {
      messages: plain(session.system, asked),
      ...samplingFields(session.sampling),
      ...(tools.length > 0 ? { tools } : {}),
    };
    let answer: Message & { tokens: readonly GeneratedToken[] } = { role: 'assistant', content: '', tokens: [] };
    const show = (part: Partial<Message>) => {
      answer = { ...answer, ...part };
      change({ messages: [...asked, answer] });
    };
    void run.start(
      request,
      (tokens) => {
        const written = [...answer.tokens, ...tokens];
        show({ content: textOf(written), tokens: written });
      },
      (reasoning, calls) => show({ reasoning, ...(calls.length > 0 ? { tool_calls: calls } : {}) }),
    );
  };
  const submit = () => {
    if (run.isRunning) return;
    if (!isChat) start(prompt);
    else if (session.draft.trim() !== '') sendMessage();
  };
  const whatWasSaid = (): GenerationRequest =>
    isChat ? { messages: plain(session.system, messages) } : { prompt: prompt + textOf(output) };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === 'Escape') run.stop();
    if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey || (isChat && !event.shiftKey))) return;
    event.preventDefault();
    submit();
  };
  const canRead =
    !run.isRunning && !reading.isReading && (isChat ? messages.length > 0 : prompt + textOf(output) !== '');
  return (
    <>
      <div class="page-head">
        <h1>Playground</h1>
        <p class="muted">
          {card.id} · {whole(card.parameters)} parameters · up to {whole(card.max_model_len)} tokens
        </p>
        {card.has_chat_template ? (
          <Segmented
            label="Kind of request"
            value={mode}
            options={[
              ['prompt', 'Prompt'],
              ['chat', 'Chat'],
            ]}
            onChange={(value) => {
              run.stop();
              setPicked(null);
              change({ mode: value });
            }}
          />
        ) : null}
      </div>
      <div class="playground">
        <div class="playground-main">
          {isChat ? (
            <ol class="chat" aria-label="Messages">
              {messages.map((message, i) => (
                <li key={String(i)} class={`message ${message.role}`}>
                  <b>{message.role}</b>
                  {message.reasoning ? (
                    <details open>
                      <summary>Reasoning</summary>
                      <p>{message.reasoning}</p>
                    </details>
                  ) : null}
                  {message.tokens?.some(({ text }) => text !== '') ? (
                    <TokenText
                      label="Answer of the model"
                      tokens={message.tokens}
                      picked={picked?.tokens === message.tokens ? picked.index : null}
                      onPick={(index) => setPicked({ tokens: message.tokens!, index })}
                    />
                  ) : (
                    <p>{message.content}</p>
                  )}
                  {(message.tool_calls ?? []).map(({ id, function: of }) => (
                    <p key={id} class="call">
                      calls <code>{of.name}</code> with <code>{of.arguments}</code>
                    </p>
                  ))}
                </li>
              ))}
            </ol>
          ) : null}
          <label class="prompt">
            <span>{!isChat ? 'Prompt' : pending ? `Result of ${pending.function.name}` : 'Message'}</span>
            <textarea
              rows={isChat ? 3 : 8}
              spellcheck={false}
              value={isChat ? session.draft : prompt}
              onInput={(event) => {
                const { value } = event.currentTarget;
                change(isChat ? { draft: value } : { prompt: value });
              }}
              onKeyDown={onKeyDown}
            />
          </label>
          <div class="row actions">
            {run.isRunning ? (
              <button type="button" class="button danger" onClick={run.stop}>
                Stop
              </button>
            ) : (
              <button
                type="button"
                class="button primary"
                onClick={submit}
                disabled={isChat && session.draft.trim() === ''}
              >
                {isChat ? 'Send' : 'Generate'}
              </button>
            )}
            {!isChat && output.length > 0 && !run.isRunning ? (
              <button
                type="button"
                class="button"
                onClick={() => {
                  change({ prompt: prompt + textOf(output) });
                  start(prompt + textOf(output));
                }}
              >
                Continue
              </button>
            ) : null}
            {isChat && messages.length > 0 && !run.isRunning ? (
              <button type="button" class="button" onClick={() => change({ messages: [] })}>
                New chat
              </button>
            ) : null}
            <button type="button" class="button" disabled={!canRead} onClick={() => void reading.start(whatWasSaid())}>
              Show what it reads
            </button>
            <span class="muted hint">{isChat ? 'Enter sends' : 'Ctrl+Enter generates, Escape stops'}</span>
          </div>
          <p class="status" role="status">
            {run.status}
          </p>
          {(toolsError ?? run.error ?? reading.error) ? (
            <p role="alert" class="error">
              {toolsError ?? run.error ?? reading.error}
            </p>
          ) : null}
          {reading.isReading ? (
            <p class="reading">
              <progress
                aria-label="Layers read"
                {...(reading.layers === null ? {} : { value: reading.done, max: reading.layers })}
              />{' '}
              Reading the text, layer {reading.done}
              {reading.layers === null ? '' : ` of ${reading.layers}`}
            </p>
          ) : null}
          {isChat || output.length === 0 ? null : (
            <Card
              title="Output"
              note="Shaded tokens were improbable. Point at one, or use the arrow keys, to see what else was likely."
            >
              <TokenText
                label="Output of the model"
                before={prompt}
                tokens={output}
                picked={picked?.tokens === output ? picked.index : null}
                onPick={(index) => setPicked({ tokens: output, index })}
              />
            </Card>
          )}
        </div>
        <div class="playground-side">
          <Alternatives
            picked={picked && (picked.tokens === output || isChat) ? picked : null}
            onUse={
              isChat || run.isRunning || !picked
                ? null
                : (text) => {
                    const chosen = picked.tokens[picked.index].alternatives.find((one) => one.text === text);
                    const token = { ...picked.tokens[picked.index], text, probability: chosen?.probability ?? 0 };
                    start(prompt, [...picked.tokens.slice(0, picked.index), token]);
                  }
            }
          />
          <SamplingForm value={session.sampling} onChange={(sampling) => change({ sampling })}>
            {isChat ? (
              <label class="field wide">
                <span>System message</span>
                <input value={session.system} onInput={(event) => change({ system: event.currentTarget.value })} />
              </label>
            ) : null}
            {isChat ? (
              <label class="field wide">
                <span>Tools (a JSON list as of the OpenAI API)</span>
                <textarea
                  rows={3}
                  spellcheck={false}
                  value={session.tools}
                  onInput={(event) => change({ tools: event.currentTarget.value })}
                />
              </label>
            ) : null}
          </SamplingForm>
        </div>
      </div>
    </>
  );
}

/** The trace of the text that was in the playground. */
export function ReadingPage({ id, session }: { readonly id: string; readonly session: Session }) {
  return (
    <>
      <div class="page-head">
        <h1>What it read</h1>
        <ReaderHint />
        <a class="button" href="#/playground">
          Back to the playground
        </a>
      </div>
      <Reader key={id} source={liveTrace(id, session.key)} />
    </>
  );
}

/** The first call of the last answer that has no result yet. */
function pendingCall(messages: readonly Message[]) {
  const at = messages.findLastIndex(({ role }) => role === 'assistant');
  const results = messages.slice(at + 1).map(({ tool_call_id: id }) => id);
  return messages[at]?.tool_calls?.find(({ id }) => !results.includes(id)) ?? null;
}

/** The tools of a text, or the reason why it is none. */
function toolsIn(text: string): readonly unknown[] | string {
  if (text.trim() === '') return [];
  try {
    const tools: unknown = JSON.parse(text);
    return Array.isArray(tools) ? tools : 'Tools: expected a JSON list';
  } catch (error) {
    return `Tools: ${(error as Error).message}`;
  }
}

function plain(system: string, messages: readonly Message[]): ChatMessage[] {
  const all = messages.map(({ tokens: _, reasoning: __, ...message }) => message);
  return system.trim() === '' ? all : [{ role: 'system', content: system }, ...all];
}

function textOf(tokens: readonly GeneratedToken[]): string {
  return tokens.map(({ text }) => text).join('');
}
