{{- define "kvhearth.name" -}}
{{- if contains "kvhearth" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvhearth" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvhearth.selector" -}}
app.kubernetes.io/name: kvhearth
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvhearth.labels" -}}
{{ include "kvhearth.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The arena's directory in the container. The daemon makes the last part itself in a volume. */}}
{{- define "kvhearth.arena" -}}
{{- if eq .Values.mode "sidecar" }}/arena/kvhearth{{ else }}/arena{{ end }}
{{- end }}

{{- define "kvhearth.sockets" -}}
{{- if eq .Values.mode "sidecar" }}/run/kvhearth/sockets{{ else }}/run/kvhearth{{ end }}
{{- end }}

{{/* Memory, its journal and its catalogue; whole pages of 2 MiB. */}}
{{- define "kvhearth.arenaMiB" -}}
{{- add .Values.memoryMiB (mul 2 (div .Values.memoryMiB 64)) 64 }}
{{- end }}

{{- define "kvhearth.container" -}}
name: kvhearth
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [serve]
env:
  - {name: KVHEARTH_MEMORY, value: {{ printf "%dMiB" (int .Values.memoryMiB) }}}
  - {name: KVHEARTH_ARENA_DIR, value: {{ include "kvhearth.arena" . }}}
  - {name: KVHEARTH_SOCKET_DIR, value: {{ include "kvhearth.sockets" . }}}
  - {name: KVHEARTH_HUGEPAGES, value: {{ ternary "require" "prefer" .Values.hugepages.enabled }}}
  {{- if .Values.ssd.enabled }}
  - {name: KVHEARTH_SSD_DIRS, value: "{{ ternary "/ssd/log" "/ssd" (eq .Values.mode "sidecar") }}={{ int .Values.ssd.sizeGiB }}GiB"}
  {{- end }}
  {{- if .Values.remote.url }}
  - {name: KVHEARTH_REMOTE, value: {{ .Values.remote.url | quote }}}
  - {name: KVHEARTH_REMOTE_STAGING, value: {{ printf "%dMiB" (int .Values.remote.stagingMiB) }}}
  - {name: KVHEARTH_REMOTE_FLEET_KEY_FILE, value: /remote/fleet.key}
  {{- end }}
  - {name: KVHEARTH_ALLOW_UIDS, value: {{ join "," .Values.allowUids | quote }}}
  # Engines use frames; gRPC is for clients in other languages.
  - {name: KVHEARTH_GRPC, value: "off"}
  # The kubelet and Prometheus come by the pod's address; the NetworkPolicy keeps it to them.
  - {name: KVHEARTH_HTTP, value: "0.0.0.0:9460"}
  - {name: KVHEARTH_HTTP_INSECURE, value: "true"}
  {{- range $name, $value := .Values.settings }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
ports:
  - {name: metrics, containerPort: 9460}
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 2
  failureThreshold: 150
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
{{- if eq .Values.mode "daemonset" }}
# Of the daemon's own pod: engines are in others, and compute without it. A sidecar has none, since
# it would be the engine's.
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 10
{{- end }}
resources:
  {{- $arena := int (include "kvhearth.arenaMiB" .) }}
  {{- $beside := add (int .Values.resources.overheadMiB) (ternary (int .Values.remote.stagingMiB) 0 (ne .Values.remote.url "")) }}
  {{- $memory := ternary $beside (add $arena $beside) .Values.hugepages.enabled }}
  requests:
    cpu: {{ .Values.resources.cpu | quote }}
    memory: {{ $memory }}Mi
    {{- if .Values.hugepages.enabled }}
    hugepages-2Mi: {{ $arena }}Mi
    {{- end }}
  limits:
    memory: {{ $memory }}Mi
    {{- if .Values.hugepages.enabled }}
    hugepages-2Mi: {{ $arena }}Mi
    {{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - {name: sockets, mountPath: /run/kvhearth}
  - {name: arena, mountPath: /arena}
  {{- if .Values.ssd.enabled }}
  - {name: ssd, mountPath: /ssd}
  {{- end }}
  {{- if .Values.remote.url }}
  - {name: remote, mountPath: /remote, readOnly: true}
  {{- end }}
{{- end }}

{{/* Files of the remote's secrets, for the daemon's group; the daemon refuses those of everybody. */}}
{{- define "kvhearth.remoteVolume" -}}
- name: remote
  secret:
    secretName: {{ required "remote.secretName: name the Secret that holds fleet.key" .Values.remote.secretName }}
    defaultMode: 0440
{{- end }}

{{- define "kvhearth.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
