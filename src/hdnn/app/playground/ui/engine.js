// The worker that computes. It can be ended at any time: a new one takes its place.

const PATIENCE = 8000; // ms that it may take to hear of a pause
let address = null;

function startWorker() {
  if (!address) {
    const code = document.getElementById("worker").textContent;
    address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  }
  return new Worker(address);
}

export class Engine {
  constructor(listeners) {
    this.listeners = listeners;
    this.worker = null;
    this.waiting = new Map();
    this.lastId = 0;
    this.impatient = 0;
  }

  // A new worker with these networks and points; whatever the old one did is over.
  begin(setup) {
    this.end();
    const worker = startWorker();
    this.worker = worker;
    worker.onmessage = ({ data }) => {
      if (worker !== this.worker) return;
      clearTimeout(this.impatient);
      if (data.id) settle(this.waiting, data);
      else this.listeners[data.type](data);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      if (worker === this.worker) this.listeners.error({ message: event.message || "The worker has stopped." });
    };
    worker.postMessage({ type: "setup", ...setup });
  }

  end() {
    clearTimeout(this.impatient);
    for (const { reject } of this.waiting.values()) reject(new Error("The training began anew."));
    this.waiting.clear();
    if (this.worker) this.worker.terminate();
    this.worker = null;
  }

  get works() {
    return this.worker !== null;
  }

  tell(type, more = {}) {
    if (this.worker) this.worker.postMessage({ type, ...more });
  }

  // Pause; a worker that does not hear of it in time is ended.
  pause() {
    if (!this.worker) return;
    this.tell("pause");
    clearTimeout(this.impatient);
    this.impatient = setTimeout(() => {
      this.end();
      this.listeners.stuck();
    }, PATIENCE);
  }

  ask(type, more = {}) {
    const id = ++this.lastId;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.tell(type, { id, ...more });
    });
  }
}

function settle(waiting, { id, type, value, message }) {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (type === "answer") resolve(value);
  else reject(new Error(message));
}

// One question to a worker of its own, so that a large file holds up nothing else.
export function askOnce(type, more, patience) {
  const worker = startWorker();
  return new Promise((resolve, reject) => {
    const late = setTimeout(() => reject(new Error("This file takes too long to read; take a smaller one.")), patience);
    const finish = ({ type, value, message }) => {
      clearTimeout(late);
      if (type === "answer") resolve(value);
      else reject(new Error(message || "This file cannot be read."));
    };
    worker.onmessage = ({ data }) => finish(data);
    worker.onerror = finish;
    worker.postMessage({ type, id: 1, ...more });
  }).finally(() => worker.terminate());
}
