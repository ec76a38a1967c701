{{/* Pod of a worker. Takes (dict "top" $ "pool" POOL "poolName" NAME "role" ROLE "of" VALUES "component" NAME "node" NODE):
     NODE is "" for an engine of one pod, else "leader" or "follower". */}}
{{- define "headrace.workerPod" -}}
{{- $top := .top -}}
{{- $pool := .pool -}}
{{- $of := .of -}}
metadata:
  labels: {{- include "headrace.labels" (dict "top" $top "component" .component) | nindent 4 }}
    headrace/pool: {{ .poolName | quote }}
    headrace/role: {{ .role }}
  {{- with $of.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "headrace.podHead" (dict "top" $top) | nindent 2 }}
  {{- include "headrace.placement" (dict "top" $top "component" .component "of" $of) | nindent 2 }}
  # longer than the drain, in which requests are finished or handed over to other workers
  terminationGracePeriodSeconds: {{ add $of.drainSeconds 30 }}
  containers:
    - name: worker
      {{- $name := ternary $top.Values.image.repository (printf "%s-%s" $top.Values.image.repository $pool.engine) (eq $pool.engine "sim") }}
      image: {{ include "headrace.image" (dict "top" $top "image" (ternary $top.Values.image $pool.image (and (eq $pool.engine "sim") (empty $pool.image))) "name" $name) }}
      imagePullPolicy: {{ $top.Values.image.pullPolicy }}
      args:
        - worker
        - --engine
        - {{ regexReplaceAll "-(cuda|cpu)$" $pool.engine "" }}
        {{- if $pool.model }}
        - --model
        - {{ $pool.model | quote }}
        {{- end }}
        {{- if $pool.servedName }}
        - --served-name
        - {{ $pool.servedName | quote }}
        {{- end }}
        - --role
        - {{ .role }}
        - --metrics-host
        - 0.0.0.0
        - --metrics-port
        - "9100"
        - --drain-grace
        - {{ $of.drainSeconds | quote }}
        - --start-timeout
        - {{ $of.startSeconds | quote }}
        {{- range $key, $value := $pool.engineArgs }}
        - --engine-arg
        - {{ printf "%s=%s" $key (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
        {{- end }}
        {{- range $key, $value := $of.engineArgs }}
        - --engine-arg
        - {{ printf "%s=%s" $key (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
        {{- end }}
        {{- if .node }}
        - --engine-arg
        - {{ printf "nnodes=%d" (int $of.nodes) }}
        - --engine-arg
        - node_rank=$(LWS_WORKER_INDEX)
        {{- if hasPrefix "vllm" $pool.engine }}
        - --engine-arg
        - master_addr=$(LWS_LEADER_ADDRESS)
        - --engine-arg
        - master_port=20000
        {{- else }}
        - --engine-arg
        - dist_init_addr=$(LWS_LEADER_ADDRESS):20000
        {{- end }}
        {{- end }}
        {{- if $of.fleet }}
        - --fleet
        - {{ $of.fleet | quote }}
        {{- end }}
        {{- if $of.price }}
        - --price
        - {{ $of.price | quote }}
        {{- end }}
        {{- range $of.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_POOL
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['headrace/pool']"}}
        - name: POD_VERSION
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['app.kubernetes.io/version']"}}
        - name: HEADRACE_WORKER_LABELS
          value: {{ concat (list "pool=$(POD_POOL)" "version=$(POD_VERSION)") ($of.labels | default list) | join "," | quote }}
        {{- if $of.zone }}
        - name: HEADRACE_WORKER_ZONE
          value: {{ $of.zone | quote }}
        {{- else }}
        # from Kubernetes 1.35 on pods have the zone of their node as a label; without it the zone is empty, which is unknown
        - name: HEADRACE_WORKER_ZONE
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
        {{- end }}
        {{- if $pool.modelCache.claim }}
        - name: HF_HOME
          value: /models
        {{- end }}
        {{- if $pool.hubTokenSecret.name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ $pool.hubTokenSecret.name | quote }}, key: {{ $pool.hubTokenSecret.key | quote }}}
        {{- end }}
        {{- include "headrace.env" (dict "top" $top "login" $pool.login "env" $of.env) | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 9100, protocol: TCP}
      {{- if ne .node "follower" }}
      {{- include "headrace.alive" (dict "port" "metrics" "scheme" "HTTP" "startSeconds" $of.startSeconds) | nindent 6 }}
      {{- include "headrace.ready" (dict "port" "metrics" "scheme" "HTTP") | nindent 6 }}
      {{- end }}
      resources: {{- toYaml $of.resources | nindent 8 }}
      securityContext: {{- include "headrace.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "headrace.mounts" (dict "top" $top "login" $pool.login) | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
        {{- if $pool.modelCache.claim }}
        - name: models
          mountPath: /models
        {{- end }}
  volumes:
    - name: data
      emptyDir:
        sizeLimit: {{ $pool.modelCache.scratch | quote }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $of.sharedMemory | quote }}
    {{- if $pool.modelCache.claim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ $pool.modelCache.claim | quote }}
    {{- end }}
    {{- include "headrace.volumes" (dict "top" $top "login" $pool.login) | nindent 4 }}
{{- end -}}
