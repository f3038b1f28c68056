// Written by tests/server/page/frame_types.py, of aioserve/engine/live_feed.py.

export type OptionField = [
  name: string,
  standard: any,
  note: string,
];

export type Came = [
  number: number,
  shown_id: string,
  user: string,
  priority: number,
  num_prompt_tokens: number,
  max_tokens: number | null,
  arrival: number,
];

export type Stands = [
  came: Came,
  state: string,
  reason: string,
  num_computed: number,
  num_output_tokens: number,
  num_cached: number,
  num_preemptions: number,
];

export type Planned = [
  step_id: number,
  time: number,
  joined: Array<number>,
  left: Array<number>,
  tokens: Array<[number, number]>,
  admitted: Array<[number, number]>,
  preempted: Array<number>,
  num_tokens: number,
  num_running: number,
  num_waiting: number,
  num_used_blocks: number,
  encoded: Array<[number, number]>,
  paused: Array<number>,
];

export type Back = [
  step_id: number,
  time: number,
  tokens: Array<[number, number]>,
];

export type Waits = [
  number: number,
  step_id: number,
  reason: string,
];

export type Ended = [
  number: number,
  time: number,
  reason: string,
  num_output_tokens: number,
];

export type Switched = [
  time: number,
  policy: string,
  options: { [key: string]: any },
];

export type Events = {
  came: Array<Came>;
  planned: Array<Planned>;
  back: Array<Back>;
  waits: Array<Waits>;
  ended: Array<Ended>;
  switched: Array<Switched>;
};

export type Lease = [
  user: string,
  shown_id: string,
  num_blocks: number,
  ends: number,
];

export type Gauges = {
  loop_lag: number;
  num_running: number;
  num_waiting: number;
  num_used_blocks: number;
  num_leased_blocks: number;
  num_leases: number;
  leases: Array<Lease>;
  num_cached_blocks: number;
  num_free_blocks: number;
  num_output_tokens: number;
  step_limit: number;
  of_policy: { [key: string]: number };
  first_tokens: Array<number>;
  gaps: Array<[number, number]>;
};

export type Histograms = {
  first_token: Array<number>;
  gap: Array<number>;
  whole: Array<number>;
};

export type Shadow = {
  policy: string;
  bounds: Array<number>;
  live: Histograms;
  shadow: Histograms;
  num_running: number;
  num_waiting: number;
  num_preemptions: number;
  num_resets: number;
  is_failed: boolean;
};

export type About = {
  version: string;
  model: string;
  policy: string;
  options: { [key: string]: any };
  policies: { [key: string]: string };
  policy_options: { [key: string]: Array<OptionField> };
  is_simulated: boolean;
  max_num_seqs: number;
  num_blocks: number;
  block_size: number;
  max_model_len: number;
  unix_time: number;
};

export type Frame = {
  kind: "frame";
  number: number;
  now: number;
  events: Events;
  gauges: Gauges;
  shadow: Shadow | null;
};

export type Snapshot = {
  kind: "snapshot";
  number: number;
  now: number;
  about: About;
  requests: Array<Stands>;
  rows: Array<number>;
  gauges: Gauges;
  shadow: Shadow | null;
};
