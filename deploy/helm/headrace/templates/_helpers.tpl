{{- define "headrace.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of every object. Takes (dict "top" $ "component" NAME). */}}
{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .top.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .top.Values.version | default .top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .top.Chart.Name .top.Chart.Version }}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .top.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Reference of an image. Takes (dict "top" $ "image" IMAGE "name" DEFAULT-REPOSITORY). */}}
{{- define "headrace.image" -}}
{{- $image := .image | default dict -}}
{{- $repository := $image.repository | default .name -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $repository $image.digest | quote }}
{{- else -}}
{{ printf "%s:%s" $repository ($image.tag | default .top.Values.image.tag | default .top.Chart.AppVersion) | quote }}
{{- end -}}
{{- end -}}

{{/* Name that NATS' chart gives its objects. */}}
{{- define "headrace.natsName" -}}
{{- $kind := .Values.nats.nameOverride | default "nats" -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $kind) (contains $kind .Release.Name) -}}
{{- .Values.nats.fullnameOverride | default $full | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "headrace.natsUrl" -}}
{{- $service := dig "service" "name" "" .Values.nats | default (include "headrace.natsName" .) -}}
{{- $port := int (dig "config" "nats" "port" 4222 .Values.nats) -}}
{{- .Values.broker.url | default (printf "nats://%s.%s.svc:%d" $service .Release.Namespace $port) -}}
{{- end -}}

{{/* Environment of every part. Takes (dict "top" $ "login" LOGIN "env" ENV). */}}
{{- define "headrace.env" -}}
- name: HEADRACE_NATS_URL
  value: {{ include "headrace.natsUrl" .top | quote }}
- name: HEADRACE_NATS_REPLICAS
  value: {{ .top.Values.broker.replicas | quote }}
- name: HEADRACE_PREFIX
  value: {{ .top.Values.broker.prefix | quote }}
- name: HEADRACE_NAMESPACE
  value: {{ .top.Values.modelNamespace | quote }}
- name: HEADRACE_LOG_LEVEL
  value: {{ .top.Values.logLevel }}
- name: HEADRACE_LOG_FORMAT
  value: json
{{- with .login }}
{{- if .secret }}
- name: HEADRACE_NATS_CONTEXT
  value: {{ printf "%s/%s" $.top.Values.broker.loginFolder .context | quote }}
{{- end }}
{{- end }}
{{- if .top.Values.broker.tlsCaSecret }}
- name: HEADRACE_NATS_TLS_CA
  value: /etc/headrace/nats-ca/ca.crt
{{- end }}
{{- range $name, $value := .env }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "headrace.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: data
  mountPath: /data
{{- if (.login | default dict).secret }}
- name: login
  mountPath: {{ .top.Values.broker.loginFolder | quote }}
  readOnly: true
{{- end }}
{{- if .top.Values.broker.tlsCaSecret }}
- name: nats-ca
  mountPath: /etc/headrace/nats-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "headrace.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if (.login | default dict).secret }}
- name: login
  secret:
    secretName: {{ .login.secret | quote }}
    defaultMode: 288
{{- end }}
{{- if .top.Values.broker.tlsCaSecret }}
- name: nats-ca
  secret:
    secretName: {{ .top.Values.broker.tlsCaSecret | quote }}
{{- end }}
{{- end -}}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Probes on the routes of a part. Takes (dict "port" NAME "scheme" HTTP "startSeconds" N). */}}
{{- define "headrace.alive" -}}
startupProbe:
  httpGet: {path: /live, port: {{ .port }}, scheme: {{ .scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add .startSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}, scheme: {{ .scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "headrace.ready" -}}
readinessProbe:
  httpGet: {path: {{ .path | default "/ready" | quote }}, port: {{ .port }}, scheme: {{ .scheme }}}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{/* Where pods of a component may run. Takes (dict "top" $ "component" NAME "of" VALUES). */}}
{{- define "headrace.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- if .top.Values.topologySpread.enabled }}
topologySpreadConstraints:
{{- range .top.Values.topologySpread.keys }}
  - maxSkew: {{ $.top.Values.topologySpread.maxSkew }}
    topologyKey: {{ . | quote }}
    whenUnsatisfiable: {{ $.top.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- include "headrace.selector" (dict "top" $.top "component" $.component) | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Head of a pod. Takes (dict "top" $), and "account" for one that asks Kubernetes. */}}
{{- define "headrace.podHead" -}}
serviceAccountName: {{ .account | default (include "headrace.name" .top) }}
automountServiceAccountToken: {{ not (empty .account) }}
enableServiceLinks: false
{{- with .top.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
securityContext: {{- include "headrace.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* A budget of disruptions. Takes (dict "top" $ "component" NAME "name" NAME "most" N). */}}
{{- define "headrace.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "headrace.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .most }}
  selector:
    matchLabels: {{- include "headrace.selector" . | nindent 6 }}
{{- end -}}

{{/* Id of a pool, as jetstream/subjects.py makes it. Takes (dict "top" $ "model" SERVED-NAME). */}}
{{- define "headrace.poolId" -}}
{{- $slug := regexReplaceAll "[^a-z0-9_-]+" (lower .model) "-" | trimAll "-" | trunc 40 | default "x" -}}
{{- printf "%s-%s" $slug (printf "%s\x00%s" .top.Values.modelNamespace .model | sha256sum | trunc 8) -}}
{{- end -}}

{{/* Names of what the planner itself scales, with commas between. Takes (dict "top" $ "several" BOOL): of one pod or several. */}}
{{- define "headrace.planned" -}}
{{- $top := .top -}}
{{- $several := .several -}}
{{- $names := list -}}
{{- range $poolName, $given := $top.Values.pools -}}
{{- $pool := mergeOverwrite (deepCopy $top.Values.poolDefaults) (deepCopy $given) -}}
{{- range $role, $own := $pool.roles -}}
{{- $of := mergeOverwrite (deepCopy $top.Values.workerDefaults) (deepCopy $own) -}}
{{- if and $of.scaling.enabled (eq $of.scaling.by "planner") (eq $several (gt (int $of.nodes) 1)) -}}
{{- $names = append $names (printf "%s-%s-%s" (include "headrace.name" $top) $poolName $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}
