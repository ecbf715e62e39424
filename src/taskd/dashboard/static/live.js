// The connection to the server: JSON, server-sent events, actions.

let session = null;

export function jobUrl(job) {
  const once = encodeURIComponent(job);
  return `/jobs/${once === job ? job : encodeURIComponent(once)}`;
}

export async function get(path) {
  return answer(await fetch(`/api/v1${path}`, { credentials: "same-origin" }));
}

export async function whoAmI() {
  session ??= await get("/session");
  return session;
}

export async function order(job, action, settings) {
  const { key } = await whoAmI();
  return answer(await fetch(`/api/v1${jobUrl(job)}/actions/${action}`, {
    method: "POST", credentials: "same-origin",
    headers: { "content-type": "application/json", "x-taskd-key": key },
    body: JSON.stringify(settings),
  }));
}

export async function signOut() {
  const { key } = await whoAmI();
  await fetch("/api/v1/session", { method: "DELETE", credentials: "same-origin", headers: { "x-taskd-key": key } });
  location.assign("/login");
}

// Calls `heard.snapshot`, `heard.job` and `heard.carpet`; `heard.lost(true)` while disconnected, and
// `heard.refused(error)` if the server says that this job cannot be shown.
export function follow(job, heard) {
  const source = new EventSource(`/api/v1${jobUrl(job)}/events`);
  for (const name of ["snapshot", "job", "carpet"]) {
    source.addEventListener(name, (event) => { heard.lost(false); heard[name]?.(JSON.parse(event.data)); });
  }
  source.addEventListener("end", () => source.close());
  source.addEventListener("error", () => {
    heard.lost(true);
    if (source.readyState === EventSource.CLOSED) refusal(job).then((error) => error && heard.refused(error));
  });
  return () => source.close();
}

// The browser does not tell why it could not open a stream.
async function refusal(job) {
  session = null;
  try {
    await whoAmI(); // or it moves to the sign-in page
    await get(jobUrl(job));
    return null;
  } catch (error) {
    return error;
  }
}

async function answer(response) {
  if (response.status === 401) {
    location.assign("/login");
    throw new Error("sign in first");
  }
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error ?? `the server answered ${response.status}`);
  return body;
}
