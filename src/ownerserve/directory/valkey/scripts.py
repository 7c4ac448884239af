"""The two scripts that run inside Valkey: read with a term, write if unchanged.

They decide nothing about owners. What they guard is the term:

- `master_replid` changes whenever a server starts or is promoted. A primary that finds another
  one in the term's record was not the one that issued under it, so it starts a new term: one above,
  with a nonce that the caller drew. Two primaries that did not hear of each other may reach the
  same ordinal, never the same nonce. Looking it up costs 7 us a script, and no clock is asked.
- An epoch above what this memory issued, carried by a caller, means that memory was lost
  (a flush, an old snapshot): a new term again, and no new owners until old leases have run out.
"""

from __future__ import annotations

_REPLID = """
local function replid()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end
local function text(number) return string.format('%.0f', number) end
"""

# KEYS: meta, then keys to read
# ARGV: ordinal, nonce, counter of the highest epoch seen; a fresh nonce; grace us; 'forget' or ''
# gives: now us, ordinal, nonce, counter, open-at us, values...
BEGIN = (
    _REPLID
    + """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local meta = redis.call('HMGET', KEYS[1], 'ordinal', 'nonce', 'counter', 'replid', 'open_us')
local ordinal, nonce = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
local counter, open = tonumber(meta[3] or 0), tonumber(meta[5] or 0)
local seen = {tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])}
local behind = seen[1] > ordinal
  or (seen[1] == ordinal and seen[2] > nonce)
  or (seen[1] == ordinal and seen[2] == nonce and seen[3] > counter)
local here = replid()
if not meta[1] or behind or ARGV[6] == 'forget' then open = now + tonumber(ARGV[5]) end
if not meta[1] or behind or ARGV[6] == 'forget' or meta[4] ~= here then
  ordinal, nonce, counter = math.max(ordinal, seen[1]) + 1, tonumber(ARGV[4]), 0
  redis.call('HSET', KEYS[1], 'ordinal', text(ordinal), 'nonce', text(nonce), 'counter', '0',
    'replid', here, 'open_us', text(open))
end
local answer = {now, ordinal, nonce, counter, open}
for i = 2, #KEYS do answer[i + 4] = redis.call('GET', KEYS[i]) end
return answer
"""
)

# KEYS: meta, then every key named below
# ARGV: ordinal, nonce, then for each decision: mints, items, and four for each item:
#   the key's number after meta, action, what is expected ('': absent), value
#   action 0 leaves it, 1 sets it, 2 deletes it, 3 sets it with the new counter behind it
# gives: for each decision the counter it used (0: none), -1 where a record had changed;
#   nothing at all when the term is another
COMMIT = (
    _REPLID
    + """
local meta = redis.call('HMGET', KEYS[1], 'ordinal', 'nonce', 'replid')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] or meta[3] ~= replid() then return {} end
local answer, at = {}, 3
while ARGV[at] do
  local first, last = at + 2, at + 2 + 4 * tonumber(ARGV[at + 1]) - 1
  local counter = 0
  for i = first, last, 4 do
    if (redis.call('GET', KEYS[ARGV[i] + 1]) or '') ~= ARGV[i + 2] then counter = -1 break end
  end
  if counter == 0 then
    if ARGV[at] == '1' then counter = redis.call('HINCRBY', KEYS[1], 'counter', 1) end
    for i = first, last, 4 do
      local key, action = KEYS[ARGV[i] + 1], ARGV[i + 1]
      if action == '1' then redis.call('SET', key, ARGV[i + 3])
      elseif action == '2' then redis.call('DEL', key)
      elseif action == '3' then
        redis.call('SET', key, ARGV[i + 3] .. struct.pack('>I8', counter))
      end
    end
  end
  answer[#answer + 1] = counter
  at = last + 1
end
redis.call('HINCRBY', KEYS[1], 'commits', 1)
return answer
"""
)
